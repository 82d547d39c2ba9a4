"""Files of equal places, and the header of the record in each."""
