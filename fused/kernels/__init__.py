"""The fused scans: of a chunk's sub-chunks, and of a chunk's blocks."""
