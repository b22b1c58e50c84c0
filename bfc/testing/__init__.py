"""What tests of allocators and sources share."""
