"""The Talker service: speech frames from text or hidden rows."""
