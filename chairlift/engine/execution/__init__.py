"""Turns plans into launches on a device. Knows no text."""
