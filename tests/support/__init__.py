"""What several tests share: processes to run in, commands to start."""
