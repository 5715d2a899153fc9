"""How is a job started? The MPI in use, its words for what is asked, ssh, and the watch over what was started."""
