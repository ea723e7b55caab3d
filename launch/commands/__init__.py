"""Commands of one file each: `ringattn NAME`."""
