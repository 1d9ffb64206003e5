"""What the notebooks share: emulated formats, ranks in threads, handwritten digits, and figures."""
