"""How the job context gets into the store and back: documents, the ledger of waiting commands, the writer."""
