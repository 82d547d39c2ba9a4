"""The levels of the cache below the device, as operators set them up and see them."""
