"""vLLM servers in the pods of a Kubernetes cluster, through its API server alone.

cluster     the cluster and namespace that --k8s names, credentials of a kubeconfig, requests to the API server
pod_object  a pod as the API server describes it: candidates for a vLLM server, restarts, ends of runs, limits
servers     the servers of a namespace: found, watched, each with its container's log and status
pod_evidence  what a bundle keeps of a server's pod: launch, status, events, logs
"""
