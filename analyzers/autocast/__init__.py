"""What a recorded float32 step would be were its model called under autocast to bfloat16."""
