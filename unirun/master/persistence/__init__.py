"""The job context in the store, written and read again: documents, the ledger of waiting commands, the writer."""
