"""What the gateways of one database share, and how they tell each other apart."""
