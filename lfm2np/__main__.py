from lfm2np.cli import main

raise SystemExit(main())
