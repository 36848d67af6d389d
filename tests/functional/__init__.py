"""Short real training runs whose numbers are held against bounds in files: `make functional`."""
