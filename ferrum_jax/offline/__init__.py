"""What is answered without weights or a device: bundles, forecasts, replays, and meshes that fit."""
