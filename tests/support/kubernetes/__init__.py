"""A real Kubernetes API server with its etcd, RBAC and audit log; only the kubelet behind it is played.

It runs in a network namespace of its own, where pods have addresses, for the API server connects to no pod on loopback.
"""
