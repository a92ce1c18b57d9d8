"""The scans of long-lived blocks."""
