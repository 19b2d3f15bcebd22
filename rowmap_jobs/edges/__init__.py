"""The only modules that talk to something outside: S3, the Kubernetes API, the model server."""
