"""One file per case. A file that stands here and defines ``CASES`` is measured; nothing else lists it."""
