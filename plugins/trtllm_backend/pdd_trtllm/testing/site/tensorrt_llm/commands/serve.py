"""The command `trtllm-serve`."""

from pdd_trtllm.testing.serve import main

if __name__ == "__main__":
    main()
