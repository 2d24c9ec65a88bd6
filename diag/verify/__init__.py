"""Check whether a change fixed an incident: two snapshots of the same servers, compared. Data only, no printing."""
