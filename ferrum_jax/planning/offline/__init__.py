"""Answers without weights or a device: bundles, padding, and replays of request logs."""
