"""A few small backbones, written to be read."""

from pliant.models.efficientnet_lite import NORM, EfficientNetLite0, efficientnet_lite0

__all__ = ["NORM", "EfficientNetLite0", "efficientnet_lite0"]
