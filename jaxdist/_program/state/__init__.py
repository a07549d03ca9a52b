"""State of a traced step: what differs between replicas, what is carried on, who has rows."""
