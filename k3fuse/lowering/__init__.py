"""Graph -> plan: operands and storage, buffers, mailboxes, bytes and times, the weight recipe."""
