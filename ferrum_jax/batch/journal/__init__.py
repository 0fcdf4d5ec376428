"""The fate of a job's rows: records in a store, leases of parts, and the merge into the output."""
