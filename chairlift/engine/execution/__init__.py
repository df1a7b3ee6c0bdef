"""Plans become launches on a device. Never reaches text."""
