"""Pure decisions: a snapshot and `now` in, a plan out. Nothing here reads or writes anything."""
