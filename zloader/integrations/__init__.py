"""Adapters for training frameworks. Each needs a package of its own, which an extra of the same name installs."""
