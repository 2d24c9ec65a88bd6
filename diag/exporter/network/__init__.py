"""The network between the ranks of a server: what NCCL reports about them, and the InfiniBand ports of this host."""
