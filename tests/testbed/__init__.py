"""Real components that the tests stand on: an S3 server, a Kubernetes cluster, images."""
