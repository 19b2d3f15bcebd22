"""What commands do, as pure functions on what was loaded. numpy is imported here, not before."""
