"""All that calls a driver: one folder a vendor."""
