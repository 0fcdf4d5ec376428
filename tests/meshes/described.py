"""Devices that are known by description only, as topologies give them."""

from scripts.slices_page import devices

V5E_4, V6E_8, V6E_16 = (devices(target) for target in ("v5e-4", "v6e-8", "v6e-16"))
