"""What would stop a job? Facts from every host, judged before anything is trained."""
