"""The way of the job context into the store and back: documents, the ledger of waiting commands, the writer."""
