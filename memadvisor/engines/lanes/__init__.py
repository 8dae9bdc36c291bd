"""Where work goes on beside the compute, and where bytes lie meanwhile: lanes, their tickets, and the tiers."""
