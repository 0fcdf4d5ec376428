"""From a sound to what is said in it: windows of the sound as requests, and a transcription of their answers.

Everything here is on the host, and knows Whisper's tokens from its checkpoint's files alone.
"""
