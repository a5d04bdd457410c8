from lfm2np.commands.cli import main

raise SystemExit(main())
