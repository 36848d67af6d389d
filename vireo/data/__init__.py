"""The data path: files to conversations, conversations to examples, examples to batches."""
