"""Training apart: processes take steps by themselves and meet now and then to agree on the weights."""
