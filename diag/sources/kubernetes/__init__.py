"""vLLM servers in the pods of a Kubernetes cluster, through its API server alone.

cluster    which cluster and namespace are meant, and the credentials of a kubeconfig
api        requests to the API server, and what a refusal means
discovery  which containers of which pods are vLLM servers, and where their pages may be
status     what the kubelet reports of a container: restarts, how it ended, limits
pod        a container's log and status as parts of its page
servers    the servers of a namespace, ready to be watched
"""
