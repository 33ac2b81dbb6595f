"""The engine: host-side scheduling of blocks and requests, device-side step functions, and what composes them."""
