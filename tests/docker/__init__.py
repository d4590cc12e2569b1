"""Networks, brokers and databases of containers, broken on purpose."""
