"""vLLM servers in the pods of a Kubernetes cluster, through its API server alone.

cluster     the cluster and namespace that --k8s names, credentials of a kubeconfig, requests to the API server
pod_object  a pod as the API server describes it: candidates for a server, restarts, ends of runs, limits, facts
servers     the servers of a namespace: found, watched with their containers' logs and status, kept in a bundle
"""
