"""What any selection costs on this device."""
