"""Drawings of snapshots. They read a snapshot only, never a live allocator."""
