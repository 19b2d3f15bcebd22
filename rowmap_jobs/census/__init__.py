"""Making, joining, choosing and cleaning censuses. Pure: numpy and the formats only."""
