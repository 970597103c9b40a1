"""The forward pass: model, capture, batches, pipeline. Knows tensors and files, and neither stores nor Kubernetes."""
