"""Convolutions for ARM CPUs."""
