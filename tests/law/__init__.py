"""The law, in the order of the argument: row alone, step widths, same tokens, teeth, doors."""
