"""Adapters to training frameworks. Each needs an extra, which its ImportError names. Nothing else imports them."""
