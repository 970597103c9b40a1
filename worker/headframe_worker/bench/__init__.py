"""`headframe bench`: what this machine makes of a job, step by step from a bare matrix product to committed parts.

timing    how long something takes on a device
matmuls   the machine's ceiling, and the model's own matrix products
workload  batches and a short trial job, drawn evenly from the real plan
commits   the pace of a pipeline by when its parts were committed
place     a temporary place beside the job's output
estimate  from tokens per second to hours
measure   all of it, in order, within a time
"""
