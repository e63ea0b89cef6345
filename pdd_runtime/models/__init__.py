"""Models as they lie on disk, read without any engine: where they are, what they are, and how they write."""
